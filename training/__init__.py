"""What ``train.py`` is made of.

config      the command line as one dataclass, and one run of it
task        what is learned: the data cut into steps for each worker, its loss and its score
images      the task of labelled images
language    the task of predicting the next word
road        how the workers' models stay one: gradients at every step, or changes after local steps
loop        a run as one of its workers
serving     the same with an asynchronous server
checkpoint  a run's state in one file
"""
