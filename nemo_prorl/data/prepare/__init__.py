"""`prorl data prepare`: conversion of public data sets, and files in their forms, into prompt records."""
