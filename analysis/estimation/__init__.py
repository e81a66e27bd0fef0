"""What can be learned from k bits a node: Fisher information of quantized samples, and the risk that it leaves.

    python -m analysis.estimation        # writes runs/estimation/: report.html, report.json, tables, figures

n nodes hold one sample each of a distribution with parameter theta in R^d, every node sends k bits, and a server
estimates theta under squared l2 loss. Barnes, Han and Ozgur ("Lower bounds for learning distributions under
communication constraints via Fisher information", JMLR 2020) bound the Fisher information of such messages; Barnes,
Inan, Isik and Ozgur (rTop-k, IEEE JSAIT 2020) model gradients as sparse Bernoulli vectors in this setting.

    models          distributions: sampler, score, constants
    quantizers      samples to k-bit messages
    information     trace of the Fisher information of a message, exact or by Monte Carlo; the k-means oracle
    bounds          upper bounds on it, and van Trees' lower bound on the risk
    priors          the boxes of parameters that van Trees' bound is taken over
    protocols       the board that nodes write on: independent, sequential, blackboard; it counts bits
    schemes         estimators that attain the rates, and their risks in closed form
    configurations  random configurations that compare values with bounds
    bridge          top-k, random-k or rTop-k: predicted by a model fitted to gradients, and measured
    study           the tables of the report
    figures         its figures

Constants called *ours* are derived in this package's docstrings; the published theorems are stated there up to a
universal constant. Information is per unit of theta squared; entropies are in nats, messages in bits.
"""
