"""Connections between the ranks beside the collectives. They report ranks that ended, hang, or call other collectives."""
