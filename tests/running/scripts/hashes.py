"""Shows how each rank hashes a word."""

import tfrep_strategy as tfrep

print("hashes", {*tfrep.all_gather_object(hash("word"))})
