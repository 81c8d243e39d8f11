package e2e_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/extevict/extevict/internal/envoy"
)

// A scene is a situation. play runs it on the Envoy at bin and returns its cells.
type scene struct {
	name string // without spaces
	play func(t *testing.T, bin string) []cell
}

// A cell is what came of one row of a scene. A row whose end is a race by nature is one
// that says so, such as "either".
type cell struct {
	row string // unique within the scene, without spaces
	got string // words, joined by commas
}

// scenes are what TestVersions runs: the phases, and what Envoy's configuration, its
// neighbours and load make of an eviction.
var scenes = append(phaseScenes(), []scene{
	{"server-ends", playServerEnds},
	{"grpc", playGRPC},
	{"http2-upstream", playHTTP2Upstream},
	{"chain", playChain},
	{"local-reply", playLocalReply},
	{"retries", playRetries},
	{"connection-queue", playConnectionQueue},
	{"slow-client", playSlowClient},
	{"server-restart", playServerRestart},
	{"message-timeout", playMessageTimeout},
	{"thousand", playThousand},
	{"races", playRaces},
}...)

// phaseScenes are the phases of a request, a scene for each way in which Envoy asks the
// ext_proc server.
func phaseScenes() (all []scene) {
	partial := mode{RequestBody: envoy.BufferedPartial, ResponseBody: envoy.BufferedPartial} // below its limit
	for _, x := range []struct {
		name string
		mode mode
	}{
		{"response-side-off", mode{ResponseHeaders: envoy.Skip}},
		{"headers-only", mode{}},
		{"trailers-only", mode{ResponseHeaders: envoy.Skip, ResponseTrailers: envoy.Send}},
		{"NONE", none}, {"STREAMED", streamed}, {"BUFFERED", buffered}, {"BUFFERED_PARTIAL", partial}, {"FULL_DUPLEX_STREAMED", duplex},
	} {
		all = append(all, scene{x.name, func(t *testing.T, bin string) []cell { return playPhases(t, bin, x.mode) }})
	}
	return all
}

// unseen is a phase of its own since Envoy 1.39 shows it: the ext_proc server has
// replied to the response headers, and not looked since. The client has not read the
// body where that goes to the server first.
var unseen = phase{"response-headers-replied", "", responseHeaders, resumes, func(m mode) []mark {
	if m.ResponseBody == "" {
		return []mark{isBusy, hasEnough}
	}
	return []mark{isBusy, wrote}
}}

// playPhases evicts in each phase. A cell has what the client got, how the backend
// ended, status and details in the access log, outcome and effect as the observer is
// told, and what the ext_proc server's loop ended with.
func playPhases(t *testing.T, bin string, m mode) []cell {
	w := start(t, setup{bin: bin, mode: m})
	var cells []*cell // each written by its row's goroutine
	var wg sync.WaitGroup
	for _, ph := range append(slices.Clone(phases), unseen) {
		shown := m.ResponseHeaders != envoy.Skip
		if !shown && (ph.hold == responseHeaders || ph.busy == responseHeaders) || !m.keeps() && ph.hold == responseEnd {
			continue // nothing that could be held
		}
		for _, p := range w.paths[:2] {
			x := &cell{row: names(ph.name, p.name)}
			cells = append(cells, x)
			wg.Go(func() {
				c, _, err := w.evictIn(p, ph)
				if err != nil {
					x.got = words(err)
					return
				}
				x.got = words(c.client()+c.resetCode(), c.upstream(), fmt.Sprintf("%d_%s", c.logged.Code, c.logged.Details),
					c.event.Outcome, c.event.Effect, ending(c.ended))
			})
		}
	}
	wg.Wait()
	var got []cell
	for _, x := range cells {
		got = append(got, *x)
	}
	return got
}

var resetCode = regexp.MustCompile(`; (\w+); received from peer$`)

// resetCode returns the code of the RST_STREAM that ended the response, as "_CODE", or
// "".
func (c *call) resetCode() string {
	if c.reply.err != nil {
		if m := resetCode.FindStringSubmatch(c.reply.err.Error()); m != nil {
			return "_" + m[1]
		}
	}
	return ""
}

// playServerEnds has an ext_proc server without the library end streams by itself, on
// HTTP/2. Its own answer is what an eviction is, also where the library does not evict.
// A cell has what the client got, and status and details in the access log.
func playServerEnds(t *testing.T, bin string) []cell {
	var rows sheet
	for _, m := range modes {
		for _, open := range []bool{false, true} {
			w := start(t, setup{bin: bin, mode: m, adopt: bare, filter: envoy.ExtProc{FailureModeAllow: open}})
			for _, how := range []struct {
				name string
				quit func(process) error
			}{{"nil", returnsNil}, {"error", returnsError}, {"answer", answers}} {
				for _, at := range []mark{requestHeaders, responseHeaders, responseBody, responseEnd} {
					switch {
					case open && how.name == "nil",
						m == none && (at == responseBody || at == responseEnd),   // not shown
						m == buffered && at == responseBody,                      // the same as the end
						m == duplex && at != requestHeaders && how.name == "nil": // lost, and how much of it is luck
						continue
					}
					name := how.name
					if open {
						name += ",fail-open"
					}
					rows.row(names(name, m, strings.ReplaceAll(string(at), " ", "-")), func() string {
						return w.outside(w.quits(t, w.paths[1], at, how.quit))
					})
				}
			}
		}
	}
	return rows.all()
}
