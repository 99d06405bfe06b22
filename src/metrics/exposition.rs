//! The numbers of many pods as one text: every family once, with the series of all pods.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::families::{FAMILIES, Family, FamilyType, POD_LABELS};
use super::reading::{PodLabels, PodReading, Sample, SampleValue};

/// Larger numbers cannot have been counted.
const LARGEST: u64 = 1 << 53;

/// The text format of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, 0.0.4.
    Prometheus,
}

impl ExpositionFormat {
    /// The media type.
    pub fn media_type(self) -> &'static str {
        match self {
            ExpositionFormat::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            ExpositionFormat::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The numbers of some pods.
#[derive(Debug)]
pub struct Exposition {
    readings: Vec<PodReading>,
}

impl Exposition {
    /// The exposition of the readings of pods or of the node.
    pub fn of(readings: Vec<PodReading>) -> Exposition {
        Exposition { readings }
    }

    /// All samples as text.
    pub fn text(self, format: ExpositionFormat) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        text::encode(&mut text, &registry).expect("numbers and labels can be written");
        match format {
            ExpositionFormat::OpenMetrics => text,
            ExpositionFormat::Prometheus => without_open_metrics(&text),
        }
    }
}

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        FAMILIES.iter().try_for_each(|family| {
            let samples: Vec<_> = self.readings.iter().flat_map(|reading| samples(reading, family)).collect();
            if samples.is_empty() {
                return Ok(());
            }
            let (name, unit) = name_and_unit(family);
            let mut metric = encoder.encode_descriptor(name, family.help, unit.as_ref(), metric_type(family.kind))?;
            samples.into_iter().try_for_each(|(labels, value)| match labels.as_slice() {
                [] => write(&mut metric, family.kind, value),
                labels => write(&mut metric.encode_family(&labels)?, family.kind, value),
            })
        })
    }
}

/// The samples of a family in a pod's answer, as far as this program understands them.
fn samples<'a>(
    reading: &'a PodReading,
    family: &'static Family,
) -> impl Iterator<Item = (Vec<(&'static str, &'a str)>, &'a SampleValue)> {
    let values = |pod: &'a PodLabels| [pod.namespace.as_str(), &pod.pod, &pod.uid];
    let of_pod = reading.pod.iter().flat_map(move |pod| POD_LABELS.into_iter().zip(values(pod)));
    let known = |sample: &&Sample| {
        let is_histogram = match &sample.value {
            SampleValue::Number(_) => false,
            SampleValue::Groups { bounds, groups, .. } if groups.len() == bounds.len() + 1 => true,
            SampleValue::Groups { .. } => return false,
        };
        sample.labels.len() == family.labels.len() && is_histogram == (family.kind == FamilyType::Histogram)
    };
    reading.families.get(family.name).into_iter().flatten().filter(known).map(move |sample| {
        let own = family.labels.iter().copied().zip(sample.labels.iter().map(String::as_str));
        // In both formats, an empty label is the same as no label.
        (of_pod.clone().chain(own.filter(|(_, value)| !value.is_empty())).collect(), &sample.value)
    })
}

fn write(metric: &mut MetricEncoder<'_>, kind: FamilyType, value: &SampleValue) -> fmt::Result {
    match (kind, value) {
        // Every counter of podfs counts whole numbers.
        (FamilyType::Counter, SampleValue::Number(number)) => {
            metric.encode_counter::<NoLabelSet, _, u64>(&(*number as u64), None)
        }
        (_, SampleValue::Number(number)) if number.fract() == 0.0 => metric.encode_gauge(&(*number as i64)),
        (_, SampleValue::Number(number)) => metric.encode_gauge(number),
        (_, SampleValue::Groups { bounds, groups, sum }) => {
            let bounds = bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(groups.iter().map(|count| (*count).min(LARGEST))).collect();
            let count = buckets.iter().map(|(_, count)| count).sum();
            metric.encode_histogram::<NoLabelSet>(*sum, count, &buckets, None)
        }
    }
}

fn metric_type(kind: FamilyType) -> MetricType {
    match kind {
        FamilyType::Gauge => MetricType::Gauge,
        FamilyType::Counter => MetricType::Counter,
        FamilyType::Histogram => MetricType::Histogram,
    }
}

/// The name and unit of a family in OpenMetrics: a counter's name is without the `_total` of its samples, and a unit is the
/// end of the name.
fn name_and_unit(family: &Family) -> (&'static str, Option<Unit>) {
    let name = family.name.strip_suffix("_total").unwrap_or(family.name);
    let units = [("_seconds", Unit::Seconds), ("_bytes", Unit::Bytes)];
    let with_unit = units.into_iter().find_map(|(end, unit)| Some((name.strip_suffix(end)?, unit)));
    with_unit.map_or((name, None), |(name, unit)| (name, Some(unit)))
}

/// Converts OpenMetrics to the text format of Prometheus: there, a counter has the name of its samples, and there are neither
/// `# UNIT` lines nor an end mark.
fn without_open_metrics(text: &str) -> String {
    let is_counter = |name: &str| Family::find(&format!("{name}_total")).is_some();
    let mut plain = String::with_capacity(text.len());
    for line in text.lines() {
        let words: Vec<_> = line.splitn(4, ' ').collect();
        match words.as_slice() {
            ["#", "UNIT", ..] | ["#", "EOF"] => continue,
            ["#", word, name, rest] if is_counter(name) => plain.push_str(&format!("# {word} {name}_total {rest}")),
            _ => plain.push_str(line),
        }
        plain.push('\n');
    }
    plain
}

#[cfg(test)]
mod tests {
    use podfs_fuse::region::Distribution;

    use super::super::families::{COMMIT_DURATION, FUSE_REQUESTS, RESIDENT_MEMORY, UP};
    use super::*;

    fn reading(pod: &str) -> PodReading {
        let labels = PodLabels { namespace: "shop".to_owned(), pod: pod.to_owned(), uid: format!("uid-{pod}") };
        let mut reading = PodReading::new(labels);
        reading.add(&UP, &[], 1.0);
        reading.add(&RESIDENT_MEMORY, &["server"], 4096.0);
        reading
    }

    #[test]
    fn many_pods_are_one_text_with_each_family_once() {
        let mut web = reading("web");
        web.add(&FUSE_REQUESTS, &["config", "LOOKUP"], 7.0);
        let durations = Distribution { bounds: vec![0.5], groups: vec![2, 1], nanoseconds: 1_750_000_000 };
        web.add_durations(&COMMIT_DURATION, &["config"], &durations);
        let readings = vec![web, reading("db")];
        let expected = r#"# HELP podfs_up Whether the supervisor of the pod answers; if not, the pod has only this metric and podfs_pod_state
# TYPE podfs_up gauge
podfs_up{namespace="shop",pod="web",uid="uid-web"} 1
podfs_up{namespace="shop",pod="db",uid="uid-db"} 1
# HELP podfs_resident_memory_bytes Memory that a process of the pod has at this moment, shared memory included
# TYPE podfs_resident_memory_bytes gauge
# UNIT podfs_resident_memory_bytes bytes
podfs_resident_memory_bytes{namespace="shop",pod="web",uid="uid-web",process="server"} 4096
podfs_resident_memory_bytes{namespace="shop",pod="db",uid="uid-db",process="server"} 4096
# HELP podfs_commit_duration_seconds Time from the assembled files of a new generation to the switch to it
# TYPE podfs_commit_duration_seconds histogram
# UNIT podfs_commit_duration_seconds seconds
podfs_commit_duration_seconds_sum{namespace="shop",pod="web",uid="uid-web",volume="config"} 1.75
podfs_commit_duration_seconds_count{namespace="shop",pod="web",uid="uid-web",volume="config"} 3
podfs_commit_duration_seconds_bucket{le="0.5",namespace="shop",pod="web",uid="uid-web",volume="config"} 2
podfs_commit_duration_seconds_bucket{le="+Inf",namespace="shop",pod="web",uid="uid-web",volume="config"} 3
# HELP podfs_fuse_requests Requests of the kernel, by operation; an operation has a series from its first request on
# TYPE podfs_fuse_requests counter
podfs_fuse_requests_total{namespace="shop",pod="web",uid="uid-web",volume="config",op="LOOKUP"} 7
# EOF
"#;
        assert_eq!(Exposition::of(readings.clone()).text(ExpositionFormat::OpenMetrics), expected);
        let plain = expected
            .replace("# UNIT podfs_resident_memory_bytes bytes\n", "")
            .replace("# UNIT podfs_commit_duration_seconds seconds\n", "")
            .replace("# HELP podfs_fuse_requests ", "# HELP podfs_fuse_requests_total ")
            .replace("# TYPE podfs_fuse_requests ", "# TYPE podfs_fuse_requests_total ")
            .replace("# EOF\n", "");
        assert_eq!(Exposition::of(readings).text(ExpositionFormat::Prometheus), plain);
    }

    #[test]
    fn any_text_stays_one_label() {
        let mut hostile = reading("a\"b\\c\n# EOF\npodfs_up 1");
        hostile.add(&FUSE_REQUESTS, &["", "\n"], 1.0);
        let text = Exposition::of(vec![hostile]).text(ExpositionFormat::Prometheus);
        let pod = r#"pod="a\"b\\c\n# EOF\npodfs_up 1""#;
        assert_eq!(text.matches(pod).count(), 3, "{text}");
        assert!(text.ends_with("uid=\"uid-a\\\"b\\\\c\\n# EOF\\npodfs_up 1\",op=\"\\n\"} 1\n"), "{text}");
        assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 3);
    }

    #[test]
    fn unknown_values_of_another_version_are_left_out() {
        let samples = r#"{"pod":{"namespace":"a","pod":"b","uid":"c"},"families":{
            "podfs_future":[{"labels":[],"value":{"number":1}}],
            "podfs_up":[{"labels":["more"],"value":{"number":1}},{"labels":[],"value":{"number":1}}],
            "podfs_commit_duration_seconds":[
                {"labels":["v"],"value":{"number":1}},
                {"labels":["v"],"value":{"groups":{"bounds":[1.0],"groups":[1],"sum":1.0}}}],
            "podfs_volumes":[{"labels":["live"],"value":{"groups":{"bounds":[],"groups":[1],"sum":1.0}}}]}}"#;
        let text =
            Exposition::of(vec![serde_json::from_str(samples).expect("a reading")]).text(ExpositionFormat::OpenMetrics);
        let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples, [r#"podfs_up{namespace="a",pod="b",uid="c"} 1"#]);
    }
}
