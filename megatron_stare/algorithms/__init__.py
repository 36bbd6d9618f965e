"""Methods of policy optimisation, one small file per method. A method's code computes with tensors
and does not depend on the ranks.

A method requests statistics of the whole batch, and uses them to compute each token's loss.
`method.py` defines the contract. To use a method of your own, set its dotted path in the
configuration.
"""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs

# methods that learn from rewards
METHODS = {
    "cispo": "megatron_stare.algorithms.cispo.Cispo",
    "clip_b": "megatron_stare.algorithms.entropy_clip.ClipB",
    "clip_cov": "megatron_stare.algorithms.clip_cov.ClipCov",
    "clip_v": "megatron_stare.algorithms.entropy_clip.ClipV",
    "dapo": "megatron_stare.algorithms.dapo.Dapo",
    "dg": "megatron_stare.algorithms.dg.Dg",
    "dr_grpo": "megatron_stare.algorithms.dr_grpo.DrGrpo",
    "entropic": "megatron_stare.algorithms.entropic.Entropic",
    "gepo": "megatron_stare.algorithms.gepo.Gepo",
    "grpo": "megatron_stare.algorithms.grpo.Grpo",
    "grpo_dropout": "megatron_stare.algorithms.grpo_dropout.GrpoDropout",
    "grpo_s": "megatron_stare.algorithms.grpo_s.GrpoS",
    "gspo": "megatron_stare.algorithms.gspo.Gspo",
    "gtpo": "megatron_stare.algorithms.gtpo.Gtpo",
    "justrl": "megatron_stare.algorithms.justrl.JustRl",
    "kl_cov": "megatron_stare.algorithms.kl_cov.KlCov",
    "opefo": "megatron_stare.algorithms.opefo.Opefo",
    "repo_r": "megatron_stare.algorithms.repo_r.RepoR",
    "stapo": "megatron_stare.algorithms.stapo.Stapo",
    "stapo_stare": "megatron_stare.algorithms.stapo_stare.StapoStare",
    "stare": "megatron_stare.algorithms.stare.Stare",
    "stare_predictive": "megatron_stare.algorithms.stare_predictive.StarePredictive",
    "steer": "megatron_stare.algorithms.steer.Steer",
    "twenty_entropy": "megatron_stare.algorithms.twenty_entropy.TwentyEntropy",
}
# methods that learn from responses that others wrote; see Method.supervised
SUPERVISED = {"sft": "megatron_stare.algorithms.sft.Sft"}
