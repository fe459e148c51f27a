"""Stages: one piece of the model on its rank, how its backward comes in halves, and the random numbers it sees."""
