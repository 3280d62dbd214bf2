"""Where everything is wired together: the live loop, the phases of a run, evaluation."""
