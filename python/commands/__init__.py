"""What the verbs of the command line do. One file a verb; imported when its verb is called."""
