"""How processes of a run find each other: they meet at one address, prove that they know a secret, and tell who they are."""
