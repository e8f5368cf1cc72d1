"""AnycostFL on Flower: real devices over TLS, each with its own sub-model (docs/deploy.md).

    messages   what server and device say to each other, as Flower's records
    device     the device's half of a round, as a Flower ClientApp
    server     the server's half, as a Flower ServerApp: a loop of our own over the Grid
    strategy   the same rounds as a Strategy, for a ServerApp of one's own
    roster     who is connected, what each can afford, who has answered
    numbers    which key has which number in the fleet
    broadcast  which steps of the downlink a device has missed
    post       messages out, replies in
    node       connects a device to the server and hands it messages, in one process
    clock      devices go by the server's clock
    link       starts Flower's SuperLink and the ServerApp, and keeps them running
    control    registers devices and starts the run
    superlink  Flower's SuperLink behind a filter
    processes  what child processes may load, where their output goes, when they end
    _internal  the only module that uses what Flower does not document
    keys       certificates and device keys
    engine     the same apps on Flower's simulation engine (Ray)

The functions that decide the result are those of the simulator, called in the same order. Needs the
extra `flower`; nothing outside this package imports it but the command line, and that lazily.
"""
