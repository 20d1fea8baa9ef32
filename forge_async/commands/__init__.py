"""What the commands of ``forge-async`` do that is no run: they read a run's folder, or start what a run would not."""
