"""`prorl data prepare`: public data sets, and files like them, as prompt records."""
