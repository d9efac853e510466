"""`prorl data prepare`: converts public data sets, and local files of the same formats, into prompt records."""
