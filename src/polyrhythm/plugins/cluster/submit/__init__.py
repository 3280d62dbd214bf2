"""Jobs for the queue of a cluster: Slurm, and KubeRay on Kubernetes."""
