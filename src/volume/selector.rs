//! Label selectors: they choose the objects that a volume shows.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::types;
use crate::types::InvalidField;

/// Requirements for the labels of an object. A selector without requirements selects every object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector(BTreeSet<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Errors are relative to the selector.
    pub(super) fn parse(selector: &LabelSelector) -> Result<Selector, InvalidField> {
        let mut requirements = BTreeSet::new();
        for (key, value) in selector.match_labels.iter().flatten() {
            check_key(key).map_err(|error| error.under("matchLabels"))?;
            requirements.insert(Requirement { key: key.clone(), test: Test::In([value.clone()].into()) });
        }
        for (index, requirement) in selector.match_expressions.iter().flatten().enumerate() {
            let parsed = Requirement::parse(requirement);
            requirements.insert(parsed.map_err(|error| error.under(format!("matchExpressions[{index}]")))?);
        }
        Ok(Selector(requirements))
    }

    /// Whether it selects an object with these labels.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|requirement| requirement.is_met(labels.get(&requirement.key)))
    }
}

impl Requirement {
    fn parse(requirement: &LabelSelectorRequirement) -> Result<Requirement, InvalidField> {
        check_key(&requirement.key).map_err(|error| error.under("key"))?;
        let values: BTreeSet<String> = requirement.values.iter().flatten().cloned().collect();
        let test = match (requirement.operator.as_str(), values.is_empty()) {
            ("In", false) => Test::In(values),
            ("NotIn", false) => Test::NotIn(values),
            ("Exists", true) => Test::Exists,
            ("DoesNotExist", true) => Test::DoesNotExist,
            ("In" | "NotIn", true) => {
                return Err(InvalidField::new("values", "must be specified when `operator` is 'In' or 'NotIn'"));
            }
            ("Exists" | "DoesNotExist", false) => {
                let sentence = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                return Err(InvalidField::new("values", sentence));
            }
            _ => return Err(InvalidField::new("operator", "must be In, NotIn, Exists or DoesNotExist")),
        };
        Ok(Requirement { key: requirement.key.clone(), test })
    }

    fn is_met(&self, value: Option<&String>) -> bool {
        let among = |values: &BTreeSet<String>| value.is_some_and(|value| values.contains(value));
        match &self.test {
            Test::In(values) => among(values),
            Test::NotIn(values) => !among(values),
            Test::Exists => value.is_some(),
            Test::DoesNotExist => value.is_none(),
        }
    }
}

fn check_key(key: &str) -> Result<(), InvalidField> {
    types::check_qualified(key).map_err(|rule| InvalidField::new("", format!("{key:?} is no label: {rule}")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_bare;

    fn parse(yaml: &str) -> Result<Selector, InvalidField> {
        let selector: LabelSelector = parse_bare(Path::new("selector.yaml"), yaml.as_bytes()).expect(yaml);
        Selector::parse(&selector)
    }

    #[test]
    fn cb_01_every_operator_and_all_requirements_together() {
        let labels = [("env", "prod"), ("tier", "")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let rows = [
            ("{}", true),
            ("{matchLabels: {env: prod}}", true),
            ("{matchLabels: {env: prod, tier: ''}}", true),
            ("{matchLabels: {env: test}}", false),
            ("{matchLabels: {zone: ''}}", false),
            ("{matchExpressions: [{key: env, operator: In, values: [test, prod]}]}", true),
            ("{matchExpressions: [{key: env, operator: NotIn, values: [test]}]}", true),
            ("{matchExpressions: [{key: env, operator: NotIn, values: [prod]}]}", false),
            ("{matchExpressions: [{key: zone, operator: NotIn, values: [a]}]}", true),
            ("{matchExpressions: [{key: tier, operator: Exists}]}", true),
            ("{matchExpressions: [{key: zone, operator: Exists}]}", false),
            ("{matchExpressions: [{key: zone, operator: DoesNotExist}]}", true),
            ("{matchLabels: {env: prod}, matchExpressions: [{key: tier, operator: DoesNotExist}]}", false),
        ];
        for (yaml, expected) in rows {
            assert_eq!(parse(yaml).expect(yaml).matches(&labels), expected, "{yaml}");
        }
    }

    #[test]
    fn selectors_that_the_api_refuses_are_refused() {
        let rows = [
            ("{matchExpressions: [{key: a, operator: In}]}", "matchExpressions[0].values: must be specified"),
            ("{matchExpressions: [{key: a, operator: Exists, values: [b]}]}", "matchExpressions[0].values: may not be"),
            ("{matchExpressions: [{key: a, operator: Near}]}", "matchExpressions[0].operator: must be In, NotIn"),
            ("{matchExpressions: [{key: -a, operator: Exists}]}", "matchExpressions[0].key: \"-a\" is no label"),
            ("{matchLabels: {-a: b}}", "matchLabels: \"-a\" is no label"),
        ];
        for (yaml, expected) in rows {
            let error = parse(yaml).expect_err(yaml).to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
