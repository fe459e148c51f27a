"""Updates: from the gradients of one rank, through what the ranks must agree on, to new weights in all versions."""
