"""`tfrep doctor --gpus`: whether replicas on the GPUs of a machine give the numbers of one device, and how fast they are."""
