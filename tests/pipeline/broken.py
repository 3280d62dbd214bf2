"""A module of a user's that cannot be imported."""

raise RuntimeError("there is no robot")
