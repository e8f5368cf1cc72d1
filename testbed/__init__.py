"""A fleet that really differs, on one machine: `python -m testbed` or `make testbed`.

A server and eight devices, each device in a network namespace of its own with a shaped link, and in
a control group with a share of a processor and a limit of memory.

network   namespaces, links, their rates
groups    control groups of version 1 or 2
members   who the devices are, and what happens to them
verdict   what the journal says about budgets
"""
