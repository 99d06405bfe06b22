use super::*;
use crate::node::sample::uid;

fn id(volume: &str) -> VolumeId {
    VolumeId { pod: uid("u"), volume: volume.to_owned() }
}

#[tokio::test]
async fn vm_06_one_operation_runs_for_a_volume_and_others_run_beside_it() {
    let mut executor = Executor::default();
    executor.begin(&id("a"), "volume_mount").expect("nothing runs");
    let refused = executor.begin(&id("a"), "volume_unmount").expect_err("one runs").to_string();
    assert_eq!(
        refused,
        "Failed to create operation with name \"volume_mount\". An operation with that name is already executing."
    );
    executor.begin(&id("b"), "volume_mount").expect("another volume");
    assert_eq!(executor.running(), BTreeSet::from([id("a"), id("b")]));
    executor.end(&id("a"), None);
    executor.begin(&id("a"), "volume_unmount").expect("the first has ended");
}

#[tokio::test(start_paused = true)]
async fn vm_05_pauses_double_from_half_a_second_to_two_minutes() {
    let mut executor = Executor::default();
    let mut pauses = Vec::new();
    for _ in 0..11 {
        executor.begin(&id("a"), "volume_mount").expect("the pause is over");
        executor.end(&id("a"), Some("no".to_owned()));
        let refused = executor.begin(&id("a"), "volume_mount").expect_err("it pauses");
        let text = refused.to_string();
        assert!(text.starts_with("No retries permitted until ") && text.ends_with(" Error: no"), "{text}");
        let StartRefusal::Pausing { pause, .. } = refused else { panic!("nothing runs") };
        assert!(text.contains(&format!("(durationBeforeRetry {pause:?})")), "{text}");
        pauses.push(pause.as_millis());
        tokio::time::advance(pause).await;
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 122_000, 122_000, 122_000]);
}

#[tokio::test(start_paused = true)]
async fn vm_05_another_operation_starts_the_pause_anew() {
    let mut executor = Executor::default();
    for _ in 0..3 {
        executor.begin(&id("a"), "volume_mount").expect("the pause is over");
        executor.end(&id("a"), Some("no".to_owned()));
        tokio::time::advance(PAUSE.longest()).await;
    }
    executor.begin(&id("a"), "volume_unmount").expect("another name");
    executor.end(&id("a"), Some("busy".to_owned()));
    let StartRefusal::Pausing { pause, .. } = executor.begin(&id("a"), "volume_unmount").expect_err("it pauses") else {
        panic!("nothing runs")
    };
    assert_eq!(pause, PAUSE.after(0));
    let now = tokio::time::Instant::now();
    assert_eq!(executor.next_retry(now), Some(now + PAUSE.after(0)));
    assert_eq!(executor.next_retry(now + PAUSE.after(0)), None, "nothing wakes for a pause that is over");
    executor.forget(&id("a"));
    executor.begin(&id("a"), "volume_unmount").expect("forgotten");
}

#[tokio::test(start_paused = true)]
async fn failures_of_a_pod_that_is_gone_are_forgotten() {
    let mut executor = Executor::default();
    let of_another = VolumeId { pod: uid("v"), volume: "a".to_owned() };
    for id in [&id("a"), &of_another] {
        executor.begin(id, "volume_mount").expect("nothing runs");
        executor.end(id, Some("no".to_owned()));
    }
    executor.forget_pod(&uid("u"));
    executor.begin(&id("a"), "volume_mount").expect("nothing is known of it");
    assert!(executor.begin(&of_another, "volume_mount").is_err(), "that pod is not gone");
}
