"""Extras that the paper does not need: faster convolutions, Flower's simulation engine."""
