"""Forms of keys and tokens that show who issued them: a prefix, and what follows it."""

# What is searched first is the prefixes alone: long repetitions make a search slow.
FORMS = (
    (r"AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA", r"[A-Z0-9]{16}"),  # AWS
    (r"amzn\.mws\.|amzn1\.oa2-cs\.", r"[\w\-.]{16,}"),
    (r"gh[pousr]_|github_pat_", r"\w{20,}"),
    (r"gl(?:pat|cbt|dt|ffct|ft|imt|agent|oas|ptt|rt|soat)-|GR1348941", r"[\w\-]{16,}"),  # GitLab
    (r"xox[abceoprs]-|xapp-", r"[\w\-]{8,}"),  # Slack
    (r"hooks\.slack\.com/services/", r"[\w/]{8,}"),
    (r"(?:sk|rk|pk)_(?:live|test|prod)_", r"\w{8,}"),  # Stripe
    (r"whsec_", r"[\w+/=]{8,}"),
    # OpenAI, Anthropic and others; GitLab, npm, PyPI, HashiCorp Vault, Toolcrib.
    (r"sk-|pypi-|hv[sbr]\.|tcb_|dckr_[op]at_|sb_secret_|tskey-[a-z]+-|nvapi-", r"[\w\-]{16,}"),
    (r"AIza|1//0", r"[\w\-]{30,}"),  # Google
    (r"ya29\.|GOCSPX-", r"[\w\-.]{16,}"),
    (
        r"npm_|do[opr]_v1_|hf_|api_org_|shp(?:at|ca|pa|ss)_|lin_(?:api|oauth)_|gsk_|xai-|pplx-|r8_"
        r"|lsv2_(?:pt|sk)_|ntn_|nfp_|sgp_|pnu_|rubygems_|rdme_",
        r"[A-Za-z0-9]{16,}\w*",
    ),
    (r"CLOJARS_|AKCp|cmVmd|oy2|EZ[AT]K|EAA|shippo_(?:live|test)_|secret_", r"[A-Za-z0-9]{32,}"),
    (r"SK|key-|pul-|sb[ps]_", r"[a-f0-9]{32,}"),  # Twilio, Mailgun, Pulumi, Supabase
    (r"LTAI|AKID|p8e-", r"[A-Za-z0-9]{16,}"),  # Alibaba, Tencent, Adobe
    (r"SG\.", r"[\w\-]{16,}\.[\w\-]{16,}"),  # SendGrid
    (r"AGE-SECRET-KEY-1", r"\w{16,}"),
    (r"dapi|dkea", r"[a-f0-9]{32}(?:-\d)?"),  # Databricks
    (r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/", r"\d+/[\w\-]{16,}"),
    (r"NR(?:AK|JS|II|IQ|BR|RA|AA|SP)-", r"[A-Za-z0-9\-]{16,}"),  # New Relic
    (
        r"gl(?:sa|c)_|sntry[su]_|fm[12][ar]?_|fo1_|ops_eyJ",
        r"[\w+/=\-]{24,}",
    ),  # Grafana, Sentry, Fly
    (r"dt0[cs]\d\d\.", r"[A-Z0-9]{16,}\.[A-Z0-9]{16,}"),  # Dynatrace
    (r"PMAK-|xkeysib-", r"[a-f0-9]{24,}-[a-zA-Z0-9]{16,}"),
    (r"AT[AC]TT3|ATBB", r"[\w\-=]{24,}"),  # Atlassian
    (r"sq0(?:atp|csp|idp)-|figd_|tfp_|AQVN|HRKU-", r"[\w\-.=]{20,}"),
    (r"access_token\$production\$", r"\w+\$[a-f0-9]{32}"),  # Braintree
    (r"pscale_(?:tkn|oauth|pw)_|dp\.(?:pt|st|ct|sa|scim|audit)\.", r"[\w\-.=]{24,}"),
    (r"eyJ[\w\-]+\.", r"[\w\-]{5,}(?:\.[\w\-]*)*"),  # JWT
)
# What is searched first, and the whole form of those with a mark inside.
MARKED = (
    (r":AA[\w\-]", r"\d{8,10}:AA[\w\-]{30,}"),  # Telegram
    (r"\dQ~", r"[\w.~]{3}\dQ~[\w.~\-]{31,34}"),  # Azure AD: a client secret
    (r"\.atlasv1\.", r"\w{14}\.atlasv1\.[\w\-=]{24,}"),  # HCP Terraform
    (r"[a-f0-9]-us\d", r"[a-f0-9]{32}-us\d{1,2}"),  # Mailchimp
    (r"[a-f0-9]NRAL", r"[a-f0-9]{36}NRAL"),  # New Relic
    (
        r"\.[\w\-]{6,7}\.[\w\-]{9}",
        r"[MNO][A-Za-z0-9]{23,27}\.[\w\-]{6,7}\.[\w\-]{27,40}",
    ),  # Discord
    (r"\.webhook\.office\.com/", r"[\w\-]+\.webhook\.office\.com/webhookb2/[\w@\-/]+"),
    (r"pat[A-Za-z0-9]+\.[a-f0-9]{9}", r"pat[A-Za-z0-9]{14}\.[a-f0-9]{32,}"),  # Airtable
    (r"v1\.0-[a-f0-9]", r"v1\.0-[a-f0-9]{24}-[a-f0-9]{32,}"),  # Cloudflare
)
PREFIXES = "|".join([prefix for prefix, _ in FORMS] + [mark for mark, _ in MARKED])
ISSUED = "|".join([f"(?:{prefix}){rest}" for prefix, rest in FORMS] + [form for _, form in MARKED])
