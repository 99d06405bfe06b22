//! Whether a PersistentVolume can be used on a node.

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

use crate::manifest::objects::NodeFacts;

/// The only field of a node that selectors can name.
const NAME: &str = "metadata.name";

/// Whether any term selects the node.
pub(super) fn matches(selector: &NodeSelector, node: &NodeFacts) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

/// A term selects a node that meets all of its requirements; one without requirements selects none.
fn term_matches(term: &NodeSelectorTerm, node: &NodeFacts) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let label = |key: &str| node.labels.get(key).map(String::as_str);
    let field = |key: &str| (key == NAME).then_some(node.name.as_str());
    !(labels.is_empty() && fields.is_empty())
        && labels.iter().all(|requirement| is_met(requirement, label(&requirement.key)))
        && fields.iter().all(|requirement| is_met(requirement, field(&requirement.key)))
}

fn is_met(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|listed| listed == value));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    let bound = number(values.first().map(String::as_str));
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number(value).zip(bound).is_some_and(|(value, bound)| value > bound),
        "Lt" => number(value).zip(bound).is_some_and(|(value, bound)| value < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::manifest::parse_bare;

    fn selects(term: &str) -> bool {
        let yaml = format!("{{nodeSelectorTerms: [{term}]}}");
        let selector: NodeSelector = parse_bare(Path::new("selector.yaml"), yaml.as_bytes()).expect(term);
        let labels = [("kubernetes.io/hostname", "worker-1"), ("disks", "4")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let mut node = NodeFacts::default();
        node.name = "worker-1".to_owned();
        node.labels = labels;
        matches(&selector, &node)
    }

    #[test]
    fn lp_04_every_operator() {
        let expression = |key: &str, operator: &str, values: &str| {
            format!("{{matchExpressions: [{{key: {key}, operator: {operator}, values: [{values}]}}]}}")
        };
        let rows = [
            ("kubernetes.io/hostname", "In", "worker-0, worker-1", true),
            ("kubernetes.io/hostname", "In", "worker-0", false),
            ("kubernetes.io/hostname", "NotIn", "worker-0", true),
            ("kubernetes.io/hostname", "NotIn", "worker-1", false),
            ("zone", "NotIn", "a", true),
            ("zone", "In", "a", false),
            ("disks", "Exists", "", true),
            ("zone", "Exists", "", false),
            ("zone", "DoesNotExist", "", true),
            ("disks", "Gt", "'3'", true),
            ("disks", "Gt", "'4'", false),
            ("disks", "Lt", "'5'", true),
            ("zone", "Lt", "'5'", false),
            ("disks", "Near", "'4'", false),
        ];
        for (key, operator, values, expected) in rows {
            assert_eq!(selects(&expression(key, operator, values)), expected, "{key} {operator} {values}");
        }
    }

    #[test]
    fn lp_04_one_term_suffices_and_needs_all_of_its_requirements() {
        let is = |name: &str| format!("{{matchFields: [{{key: metadata.name, operator: In, values: [{name}]}}]}}");
        assert!(selects(&is("worker-1")));
        assert!(selects(&format!("{}, {}", is("other"), is("worker-1"))));
        assert!(!selects("{}"));
        assert!(!selects("{matchExpressions: [{key: disks, operator: Exists}, {key: zone, operator: Exists}]}"));
    }
}
