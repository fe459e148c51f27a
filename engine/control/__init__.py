"""Control: how ranks hear of each other beside the channels of their data, and what they say of a rank that is lost."""
