"""`prorl report`: one HTML file that shows a run, a chain of stages, or several of them beside each other."""
