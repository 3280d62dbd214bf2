"""GR00T N1.5 (NVIDIA 2025): an Eagle vision-language backbone and a diffusion transformer with flow matching."""
