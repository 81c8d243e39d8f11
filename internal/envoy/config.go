package envoy

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"text/template"
	"time"
)

// EndpointHeader is the request header in which an endpoint picker names the
// upstream, as ip:port, when [Upstream.ByHeader] is set. The name is that of the
// Gateway API Inference Extension.
const EndpointHeader = "x-gateway-destination-endpoint"

// A Config describes an Envoy with one listener, which speaks HTTP/1.1 and HTTP/2
// with prior knowledge, and one route, "/", through the ext_proc filters to the
// upstream. The route has no timeout. Addresses are ip:port.
type Config struct {
	ExtProc  []ExtProc // in the order in which they see a request; a response passes them backwards
	Upstream Upstream

	// DelayedClose is the listener's delayed_close_timeout; nil leaves Envoy's own,
	// one second.
	DelayedClose *time.Duration
	RetryPolicy  json.RawMessage // the route's retry_policy (config.route.v3.RetryPolicy); nil for none
	LocalReply   json.RawMessage // local_reply_config (http_connection_manager.v3.LocalReplyConfig); nil for none
	Concurrency  int             // worker threads; 0 for one
}

// An ExtProc is one ext_proc filter. Fields that are named as Envoy's are Envoy's.
type ExtProc struct {
	Address                  string // of the ext_proc server, which speaks gRPC without TLS
	Mode                     ProcessingMode
	MessageTimeout           time.Duration // 0 for ten seconds
	FailureModeAllow         bool
	AllowModeOverride        bool
	DisableImmediateResponse bool
	ObservabilityMode        bool
	UpstreamFilter           bool // in the upstream's cluster, behind the router: each try has a stream of its own
	// ReceivingNamespaces are those in which the server may set dynamic metadata.
	// The access log shows them in [Entry.Metadata].
	ReceivingNamespaces []string
}

// A ProcessingMode says what a filter shows its server. A mode that is empty is
// Envoy's default: headers SEND, bodies NONE, trailers SKIP.
type ProcessingMode struct {
	RequestHeaders, ResponseHeaders   HeaderMode
	RequestBody, ResponseBody         BodyMode
	RequestTrailers, ResponseTrailers HeaderMode
}

// A HeaderMode is a ProcessingMode.HeaderSendMode of Envoy.
type HeaderMode string

const (
	Default HeaderMode = "DEFAULT"
	Send    HeaderMode = "SEND"
	Skip    HeaderMode = "SKIP"
)

// A BodyMode is a ProcessingMode.BodySendMode of Envoy.
type BodyMode string

const (
	None            BodyMode = "NONE"
	Streamed        BodyMode = "STREAMED"
	Buffered        BodyMode = "BUFFERED"
	BufferedPartial BodyMode = "BUFFERED_PARTIAL"

	// FullDuplexStreamed needs the trailer mode of the same direction to be Send.
	FullDuplexStreamed BodyMode = "FULL_DUPLEX_STREAMED"
)

// An Upstream is where requests go. It has either Endpoints or ByHeader.
type Upstream struct {
	Endpoints []string // taken in turn
	// ByHeader sends a request to the endpoint that its EndpointHeader names when it
	// has passed the ext_proc filters. Whoever may reach such a listener chooses a
	// connection's target unless a filter overwrites the header.
	ByHeader       bool
	HTTP2          bool   // prior knowledge; else HTTP/1.1
	MaxConnections uint32 // the circuit breaker; 0 for a million. Requests beyond it wait
}

//go:embed config.yaml.tmpl
var configText string

var configTemplate = template.Must(template.New("config").Funcs(template.FuncMap{
	"duration":        formatDuration,
	"endpointHeader":  func() string { return EndpointHeader },
	"json":            formatJSON,
	"namespaces":      namespaces,
	"numbered":        func(i int, p ExtProc) numbered { return numbered{i, p} },
	"socketAddress":   socketAddress,
	"upstreamFilters": upstreamFilters,
}).Parse(configText))

// A numbered filter is one with its place in Config.ExtProc.
type numbered struct {
	N int
	ExtProc
}

// upstreamFilters reports whether any filter is in the upstream's cluster.
func upstreamFilters(c Config) bool {
	return slices.ContainsFunc(c.ExtProc, func(p ExtProc) bool { return p.UpstreamFilter })
}

// Render returns c as an Envoy configuration in YAML. Listener and admin have port 0,
// and the access log is relative to the directory Envoy runs in. It fails on what is
// no address, no JSON, or no upstream; all else is Envoy's to judge.
func (c Config) Render() ([]byte, error) {
	if c.Upstream.ByHeader == (len(c.Upstream.Endpoints) > 0) {
		return nil, errors.New("envoy: an Upstream has either Endpoints or ByHeader")
	}
	c.ExtProc = slices.Clone(c.ExtProc)
	for i := range c.ExtProc {
		if p := &c.ExtProc[i]; p.MessageTimeout == 0 {
			p.MessageTimeout = 10 * time.Second
		}
	}
	var b bytes.Buffer
	if err := configTemplate.Execute(&b, c); err != nil {
		return nil, fmt.Errorf("envoy: rendering the configuration: %w", err)
	}
	return b.Bytes(), nil
}

// formatDuration writes d as protobuf's JSON does, which knows only seconds.
func formatDuration(d time.Duration) string {
	return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + "s"
}

// formatJSON writes v on one line. JSON is YAML, so this is how text gets quoted.
func formatJSON(v any) (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return "", err
	}
	return string(bytes.TrimSuffix(b.Bytes(), []byte("\n"))), nil
}

func namespaces(ps []ExtProc) []string {
	var all []string
	for _, p := range ps {
		all = append(all, p.ReceivingNamespaces...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func socketAddress(s string) (string, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return "", fmt.Errorf("%q: %w", s, err)
	}
	return fmt.Sprintf("{socket_address: {address: %q, port_value: %d}}", a.Addr(), a.Port()), nil
}
