"""AnycostFL on Flower: real devices over TLS, each with its own sub-model (docs/deploy.md).

    messages   messages of `wire` as Flower's records; messages out, replies in
    device     the device's half of a round, as a Flower ClientApp
    server     the server's half, as a Flower ServerApp that runs the common loop
    strategy   the same rounds as a Strategy, for a custom ServerApp
    fleet      which devices are connected, what each can spend, which have replied
    numbers    which key has which number in the fleet
    node       connects a device to the server and hands it messages, whatever its clock says
    link       starts Flower's SuperLink and the ServerApp, registers devices, restarts what dies
    superlink  Flower's SuperLink behind a filter
    _internal  the only module that uses what Flower does not document
    keys       certificates and device keys

Rounds are those of the simulator (`loop`, `rounds`). Needs the extra `flower`; outside this package
only the command line and `contrib.ray` import it.
"""
