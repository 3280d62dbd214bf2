"""Predicts the time of a layout from stage times; pure functions."""
