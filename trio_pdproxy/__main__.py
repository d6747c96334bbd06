"""`python -m trio_pdproxy` is the command `trio-pdproxy`."""

from trio_pdproxy.cli import main

main()
