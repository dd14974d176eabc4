"""What is imported by processes from which ranks are forked."""
