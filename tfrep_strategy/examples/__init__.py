"""What the notebooks share: pictures made on the spot, devices, a clock, a score, and plots.

These modules are for teaching. Nothing else in the package needs them, except the plots, which the demo draws too.
"""
