"""Where stages run: this process, other processes, Ray, Slurm."""
