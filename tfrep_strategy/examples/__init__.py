"""What the notebooks share: devices, a clock, folders of pictures, trained weights, a score, and plots.

These modules are for teaching. Nothing else in the package needs them, except the plots, which the demo draws too.
"""
