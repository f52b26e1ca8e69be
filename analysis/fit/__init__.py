"""What a load costs against its cold share: bins, lines, measured ends; the targets `fit`, `fig3` and `regress`."""
