"""How the ranks of a run hear of each other beside the collectives: who has ended, who is awaited, who calls what."""
