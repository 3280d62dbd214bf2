"""The first weights of a run: from a checkpoint, or from demonstrations and supervised learning."""
