"""`megamoe certify`: ordered checks of a backend on this machine, a report, and a certificate."""
