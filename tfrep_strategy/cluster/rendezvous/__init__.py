"""The rendezvous of the processes of a run: they meet at one address, prove that they know a secret, and exchange statements."""
