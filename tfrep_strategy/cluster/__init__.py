"""The processes of a run: their identity, rendezvous and signs of life, and the hardware of their machines."""
