"""The machine that this process runs on: what its sensors say, and what a stretch of work took.

sensors   its name, clocks, meters of energy, temperatures
usage     joules, peak memory, clock and temperature of a stretch of work
clock     setting the clock, where the system allows it
"""
