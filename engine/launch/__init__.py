"""Launch: how the ranks of a pipeline come to be, here or under another launcher, and find each other."""
