"""Alerts that leave the machine: what is wrong (`rules`), where it is sent (`targets`), and the daemon (`__main__`)."""
