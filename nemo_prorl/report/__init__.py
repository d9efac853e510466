"""`prorl report`: one HTML file with a run, a chain of stages, or several of them side by side."""
