"""Others beside us: drivers that call the public interfaces of other packages, each runnable alone."""
