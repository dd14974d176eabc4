"""The processes of a run: who and where they are, how they meet, whether they live, and what their machines have."""
