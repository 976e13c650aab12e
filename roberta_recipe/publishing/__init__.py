"""What leaves the machine: a run's files on the Hub, its model card, its plots."""
