"""Alerts that leave the machine: what is wrong, and the daemon that tells it (`__main__`), and to whom (`targets`)."""
