"""π0 and π0.5 (Black et al. 2024, 2025): a PaliGemma prefix and an action expert with flow matching."""
