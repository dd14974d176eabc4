"""A word by which the tests find their processes."""

from observing import has_no_launcher, marker  # noqa: F401
