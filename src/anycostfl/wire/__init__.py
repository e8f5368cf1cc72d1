"""What server and device say to each other, whatever carries it.

info → capabilities     the experiment and the round; which device are you, what can you spend?
task → result           your sub-model and how to upload; the payload, and the next capabilities
evaluate → evaluation   the whole model; the number of correct predictions on your test samples
rejection               you cannot take part, and why

envelope   tables and arrays, read with care
messages   the messages above, and which versions understand each other
"""
