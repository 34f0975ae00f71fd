"""What basp is measured against. Each module has ``build(workload, device)``, and imports its package only there."""
