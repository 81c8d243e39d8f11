package main

import (
	"fmt"
	"math"
	legacy "math/rand"
	"os"
	"text/tabwriter"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/sim"
)

// tolerance is how far the simulator's means may be off the prototype's.
const tolerance = 0.10

// prototype is TTFT p50 and p99 in ms and tokens of sheddable work a second, as the prototype prints
// them for its seeds 1 to 5. It is the model that the targets come of: ticks of 1 ms, one file; run
// with -dur 420 -hpscale 2 and
//
//	S2: -workers 400 -blocks 3000
//	S3: -workers 150 -blocks 16000 -b 0.02
//	none:              -policy none -gate util
//	gauge, lagging:    -policy peer -gate util -grace 2300
//	gauge, concurrency: -policy peer -gate conc -maxconc 24 (S3: 18)
var prototype = []struct {
	scene, policy string
	seeds         [5][3]float64
}{
	{"S2", none, [5][3]float64{{558, 1781, 8910}, {598, 2171, 8945}, {616, 1476, 8976}, {560, 1845, 8788}, {577, 1598, 8875}}},
	{"S2", lagging, [5][3]float64{{578, 2216, 8904}, {598, 1964, 8946}, {581, 1689, 8985}, {538, 1938, 8795}, {556, 1431, 8888}}},
	{"S2", concurrency, [5][3]float64{{106, 674, 7405}, {117, 630, 7440}, {108, 663, 7456}, {105, 637, 7373}, {110, 767, 7412}}},
	{"S3", none, [5][3]float64{{2263, 8983, 2202}, {2558, 7625, 2131}, {2522, 11570, 1916}, {3294, 12028, 2041}, {2725, 10924, 1826}}},
	{"S3", lagging, [5][3]float64{{1834, 7780, 2170}, {1826, 8008, 2119}, {2520, 11324, 1908}, {1915, 9383, 2035}, {1850, 9022, 1826}}},
	{"S3", concurrency, [5][3]float64{{178, 2324, 2014}, {219, 5029, 1910}, {210, 6109, 1740}, {220, 4528, 1869}, {227, 4703, 1641}}},
}

// prototypeTick is by how much a step of the prototype is longer than its cost says, since it ends at
// the next full millisecond.
const prototypeTick = time.Millisecond / 2

// calibrate compares the simulator with the prototype, and reports whether they agree: with steps that
// are as long, within the tolerance, or where the prototype's own seeds differ by so much that
// five of them cannot tell, within twice the standard error of their mean.
func calibrate(p *pool, t traces) bool {
	name := func(scene, policy string, tick time.Duration) string { return fmt.Sprint(scene, policy, tick) }
	var vs []variant
	for _, row := range prototype {
		for _, tick := range []time.Duration{0, prototypeTick} {
			vs = append(vs, variant{name(row.scene, row.policy, tick), func(seed uint64) numbers {
				c := t.s2()
				if row.scene == "S3" {
					c = t.s3()
				}
				c.Seed, c.Policy = seed, gauges(row.scene)[row.policy]
				// The prototype's seed says where the backlog begins: let it begin there. It also jitters retries.
				c.Start = 1 + legacy.New(legacy.NewSource(int64(seed))).Intn(len(c.Sheddable))
				if c.Engine.Cost == (engine.Cost{}) {
					c.Engine.Cost = engine.DefaultCost
				}
				c.Engine.Cost.Step += tick
				return summary(sim.Run(c, nil))
			}})
		}
	}
	r := p.results(vs, len(prototype[0].seeds))
	p.wg.Wait()
	fmt.Println("Calibration: means of 5 seeds, for the prototype with their standard deviation. The prototype's steps end at full")
	fmt.Println("milliseconds, which makes them 0.5 ms longer than those of the simulator: with them as long (+0.5 ms) the two must agree.")
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "scene\tpolicy\tnumber\tprototype\tsimulator\toff by\t+0.5 ms\toff by\twithin 10 %")
	ok := true
	for _, row := range prototype {
		for i, number := range []string{p50, p99, rate} {
			want, deviation := meanOf(row.seeds[:], i)
			off := func(tick time.Duration) (got, off float64) {
				got = r.mean(name(row.scene, row.policy, tick), number)
				return got, got/want - 1
			}
			plain, offPlain := off(0)
			same, offSame := off(prototypeTick)
			verdict := "yes"
			if unsure := 2 * deviation / want / math.Sqrt(float64(len(row.seeds))); math.Abs(offSame) > max(tolerance, unsure) {
				verdict, ok = "NO", false
			} else if math.Abs(offSame) > tolerance {
				verdict = fmt.Sprintf("no, but the prototype's mean is +-%.0f %%", 100*unsure)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%.0f (%.0f)\t%.0f\t%+.1f %%\t%.0f\t%+.1f %%\t%s\n", row.scene, row.policy, number, want, deviation, plain, 100*offPlain, same, 100*offSame, verdict)
		}
	}
	w.Flush()
	return ok
}

// meanOf is the mean of one of the seeds' numbers, and its standard deviation.
func meanOf(seeds [][3]float64, i int) (mean, deviation float64) {
	n := float64(len(seeds))
	for _, s := range seeds {
		mean += s[i] / n
	}
	for _, s := range seeds {
		deviation += (s[i] - mean) * (s[i] - mean) / (n - 1)
	}
	return mean, math.Sqrt(deviation)
}
