"""Samples of any shape: how they are read, prepared and split over a fleet.

samples   inputs and targets as trees of tensors, and whom each sample belongs to
prepare   what is fitted once on all samples and applied by every holder
split     which device holds which samples
files     arrays, tables and folders that hold samples
"""
